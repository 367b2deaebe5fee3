"""The front end: plain modules of JavaScript in `static/`, drawn by uPlot, without a build step and without a network.

inline      the modules as one script, for a page that is one file
html        the HTML report: one file
"""

"""The front end: plain JavaScript modules in `static/`, drawn with uPlot, without a build step or a network."""

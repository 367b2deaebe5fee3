"""The front end: plain JavaScript modules in `static/` and uPlot. It needs no build step and no network."""

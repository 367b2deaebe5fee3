"""The front end: uPlot and plain JavaScript modules in `static/`. It needs no build step and no network."""

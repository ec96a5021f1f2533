"""Several runs on one page: `mugrpo report RUN RUN --out PAGE.html`, and a sweep's page."""

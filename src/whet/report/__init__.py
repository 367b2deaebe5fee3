"""Read run folders and render them, without writing into them.

Models of a run:
    run_status      RunStatus, which is cheap enough for lists, and LiveStatus for the live terminal view
    run_report      RunReport, a subclass of RunStatus with everything in a run folder
    timeline, tracks, evaluation, plan_evidence, advice    the parts of a report

Renderers:
    text, text_chart    plain text
    page/               the HTML report, and the front end of the live page
    watch/              the live page and the live terminal view
    comparison          several runs side by side
    run_view            whet.open_run(): curves and plots in Python
    export/, forward/   metrics as files, or sent to a dashboard

Other reports are bench_report, search_report and seeds. svg and table are shared by all.
"""

"""Read run folders and render them, without writing into them.

One model of a run:
    run_status      RunStatus: what lists can afford to read; LiveStatus: the live terminal view
    run_report      RunReport: everything in a run folder; it extends RunStatus
    timeline, tracks, evaluation, plan_evidence, advice    its parts

Its renderers:
    text, text_chart    plain text
    markdown            for an issue or a README
    page/               the HTML report, and the front end of the live page
    watch/              the live page and the live terminal view
    comparison          several runs side by side
    run_view            whet.open_run(): curves and plots in Python
    export/, forward/   numbers as files, or to a dashboard

Other reports: bench_report, search_report, seeds; svg and table are shared by all.
"""

"""`shardkit view`: a dataset as web pages for this machine only, or as a static site.

    explored.py   an open dataset, its tables and its tokenizer: what pages read
    scan.py       lines of a table from a place on, within a bounded time
    summary.py    what takes one pass over the tables of removed documents; background.py: made in a thread
    overview.py removed.py kept.py rows.py search.py compare.py    a page is a function: parameters -> facts
    site.py       pages by name, rendered by the templates in pages/
    server.py     the site over HTTP; export.py: the site as files

Pages only read. No table is ever loaded as a whole: a page reads the row groups it shows, a search stops when
its time is over and continues at the next request, and memory does not grow with the dataset. Texts may be
hostile: templates escape everything, and characters that command or reorder are shown as symbols.
"""

"""Shows a dataset as web pages (`shardkit view`), on this machine only, or as a static site.

    explored.py   the data that pages read: an open dataset, its tables and its tokenizer
    scan.py       reads lines of a table from a given place, within a bounded time
    summary.py    counts in one pass over the tables of removed documents; background.py runs it in a thread
    histogram.py kept_values.py    the picture of a rule: values of kept documents beside dropped ones
    overview.py removed.py kept.py topics.py rows.py search.py compare.py
                  page functions: parameters -> facts
    site.py       finds pages by name and renders them with the templates in pages/
    server.py     serves the site over HTTP; export.py writes it to files

Pages only read. No table is ever loaded as a whole: a page reads the row groups that it shows, a search stops
at its time limit and continues at the next request, and memory does not grow with the dataset. Texts may be
hostile: templates escape everything, and control characters and characters that reorder text are shown as
symbols.
"""

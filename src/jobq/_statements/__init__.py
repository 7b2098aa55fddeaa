"""Every statement that jobq sends, as operations: generators that know no driver and do no I/O.

A name without a schema stands only where nobody's function could fit better than PostgreSQL's: operands have
exactly its types (domains are cast), and what is polymorphic is named with its schema. `unnest` of several
arrays is the parser's own, and stands without. `tests/test_search_path.py` holds each statement to it.
"""

"""Faults that are really made, and the auditor that says whether anything was lost by them.

`producer` and `worker` are processes that note what they do, in files of their own; `stage` starts them
before a server, `faults` hurts them or it, and `auditor` reconciles the notes with the tables afterwards.
"""

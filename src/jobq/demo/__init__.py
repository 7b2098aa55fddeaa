"""The demonstration: a shop's 2,000 e-mails, two workers, one of them killed on the way.

The application itself is `jobq.demo.shop` (``examples/shop.py``); the rest plays the world around it: a
database, a mail server with moods, an accident, and a bookkeeper who counts what became of each order.
"""

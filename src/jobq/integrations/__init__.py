"""Optional companions: each needs a library of its own, and nothing else in jobq needs any of them.

- :mod:`jobq.integrations.prometheus`: metrics of queues and workers, to scrape.
- :mod:`jobq.integrations.opentelemetry`: spans and metrics by the conventions for messaging.
- :mod:`jobq.integrations.sentry`: failed jobs as Sentry events, and an example of a middleware.
"""

# pyright: basic, reportMissingImports=false
"""Scripts that run other queues inside their own environments; `runner` tells what one defines."""

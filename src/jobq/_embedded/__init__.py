"""The parts of :mod:`jobq.embedded`: an edge of jobq that the core never imports."""

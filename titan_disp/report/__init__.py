"""One or several runs as one HTML page that needs nothing else: ``titan-disp report``."""

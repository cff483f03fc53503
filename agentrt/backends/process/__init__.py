"""Native processes: `launcher.py` starts them confined in leaves of their own, `process.py` is one of them."""

"""Makes the modules beside this file (reference.py) importable from every test."""

"""One row for every combination of settings: ``--sweep k=1,2,4 --sweep temperature=0,1``."""

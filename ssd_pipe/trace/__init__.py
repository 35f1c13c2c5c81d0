"""From the logs of a run's processes to one time line: tables, traces, pictures. No torch."""

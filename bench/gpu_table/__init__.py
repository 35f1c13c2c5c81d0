"""One table of everything that two GPUs are measured at, beside what it is to reach.

``parts`` says which benchmarks are run, ``rows`` which of their figures has which goal; ``run`` and
``command`` put the two together.
"""

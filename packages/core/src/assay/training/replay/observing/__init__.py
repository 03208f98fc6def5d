"""A trainer's step seen from outside: what each phase is given and leaves."""

"""A small, exact laboratory for attention. Start reading at `speechformer.train`."""

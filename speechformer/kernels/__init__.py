"""Fast versions of `speechformer.layers`, chosen by `dispatch`: same parameters, same results."""

"""Many runs at once: sweepers, a launcher, recovery."""

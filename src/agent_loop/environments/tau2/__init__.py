"""Tasks of tau2-bench: customer service with tools, a data base and a user, as the package `inspect-evals` has them."""

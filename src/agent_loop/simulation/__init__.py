"""A cluster on a virtual clock: the real manager, pool, balancer and worker against simulated servers."""

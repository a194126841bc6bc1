"""The ground floor of relit: stores, shards, manifests, the commit log, run directories, data.

Knows neither Ray nor torch.
"""

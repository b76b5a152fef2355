"""Servers that tests start: a real S3 (Ceph RGW) and a proxy that breaks what passes through it."""

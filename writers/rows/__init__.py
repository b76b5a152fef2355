"""Data that steps pass on: documents, the results of filters, and counts that must add up."""

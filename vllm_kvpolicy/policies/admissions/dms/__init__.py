"""DMS: a model trained for it decides which tokens leave its cache."""

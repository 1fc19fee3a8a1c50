"""Engines that run on this library: one module per engine names it, and nothing else in the project does."""

"""Stand-ins for packages, imported under the packages' own names."""

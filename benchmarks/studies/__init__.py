"""One script a study: it measures, appends each run to its JSON in `results`, prints a table."""

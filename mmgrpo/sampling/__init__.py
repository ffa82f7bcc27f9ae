"""Who is rolled out, how often, under which noise."""

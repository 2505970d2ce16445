"""What callers do: any order of calls, mistakes, ranks that differ."""

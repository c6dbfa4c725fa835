"""The machinery: starts ranks, watches them, records what they say."""

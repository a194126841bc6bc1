"""The job specification: what a user asks for, validated."""

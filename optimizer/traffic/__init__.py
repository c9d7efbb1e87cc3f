"""What an endpoint's clients send: trace readers, profiles, synthetic prompts of that shape. Never anybody's text."""

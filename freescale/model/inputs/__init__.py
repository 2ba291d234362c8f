"""What an encoder is given: items made of content, texts or towers; features of events, items and users as tokens."""

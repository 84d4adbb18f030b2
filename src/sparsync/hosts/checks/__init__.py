"""What a user may have done wrongly, found before or at the first step."""

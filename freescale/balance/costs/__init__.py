"""What samples cost and how fast ranks are: models, fits to measured steps, what ranks agreed on."""

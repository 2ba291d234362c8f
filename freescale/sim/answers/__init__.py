"""What comes out: predictions, their sensitivity, tables and pages."""

"""Large models as configurations, built without memory."""

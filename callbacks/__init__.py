"""What watches or steers a run through Lightning's hooks; knows neither lm nor data."""

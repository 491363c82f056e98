"""The report as one HTML file: `page` fills the template, `picture` computes what scripts draw."""

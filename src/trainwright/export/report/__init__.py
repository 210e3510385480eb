"""The parts of a report page: charts in SVG, and one file a section."""

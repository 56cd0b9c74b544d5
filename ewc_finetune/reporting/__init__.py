"""What a report shows and how: runs compared, figures drawn as SVG, one page of HTML. Needs no torch."""

"""Files that outlive the server: plots, a report for print, a page with its answers inside."""

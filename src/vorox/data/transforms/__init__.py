"""What happens to documents between reading and packing: filters, removal of duplicates, augmentation."""

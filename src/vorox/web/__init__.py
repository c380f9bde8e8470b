"""What the local servers share: access rules, and the socket they listen on."""

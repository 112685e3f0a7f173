"""The websockets gateway: connections, access rules and HTTP pages in front of a pool."""

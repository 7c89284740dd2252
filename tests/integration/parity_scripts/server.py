WHO = "the user's server"

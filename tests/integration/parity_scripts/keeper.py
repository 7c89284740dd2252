WHO = "the user's keeper"

WHO = "the user's wire"

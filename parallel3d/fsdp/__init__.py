"""fsdp"""

"""Acting: slots, the shift transaction and the controller. Speaks to the outside through ``ports``."""
